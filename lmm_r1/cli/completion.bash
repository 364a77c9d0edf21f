# Completion of lmm-r1 for bash, made by `lmm-r1 completion bash`.

# TABLE

_lmm_r1() {
  local named flags values command=${COMP_WORDS[1]} cur=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
  # bash takes --flag=value for three words.
  if [[ $cur == "=" ]]; then
    cur=""
  elif [[ $before == "=" ]]; then
    before=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  ((COMP_CWORD > 1)) || command=""
  _lmm_r1_known "$command" "$before" || return 0
  if [[ $COMP_CWORD -gt 2 && " $named " == *" ${COMP_WORDS[2]} "* ]]; then
    # Of those whose names are no commands of their own, the flags stay.
    _lmm_r1_known "$command ${COMP_WORDS[2]}" "$before" || _lmm_r1_known "$command" "$before"
    named=""
  elif ((COMP_CWORD > 2)); then
    named=""
  fi
  if [[ $values == @files ]]; then
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
  elif [[ -n $values ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
  elif [[ $cur == -* || -z $cur ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$named $flags" -- "$cur")
  elif [[ -n $named ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$named" -- "$cur")
  else
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
  fi
}

complete -o filenames -F _lmm_r1 lmm-r1
