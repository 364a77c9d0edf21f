#compdef lmm-r1
# Completion of lmm-r1 for zsh, made by `lmm-r1 completion zsh`.

# TABLE

_lmm_r1() {
  local -a line=("${words[@]}")
  local named flags values command=$line[2] cur=$line[CURRENT] before=$line[CURRENT-1] place=$CURRENT
  if [[ $cur == --*=* ]]; then
    before=${cur%%=*}
    compset -P '*='
  fi
  ((place > 2)) || command=""
  _lmm_r1_known "$command" "$before" || return 1
  if [[ $place -gt 3 && " $named " == *" $line[3] "* ]]; then
    # Of those whose names are no commands of their own, the flags stay.
    _lmm_r1_known "$command $line[3]" "$before" || _lmm_r1_known "$command" "$before"
    named=""
  elif ((place > 3)); then
    named=""
  fi
  if [[ $values == @files ]]; then
    _files
  elif [[ -n $values ]]; then
    compadd -- ${=values}
  elif [[ $cur == -* ]]; then
    compadd -- ${=flags}
  elif [[ -n $named ]]; then
    compadd -- ${=named} ${=flags}
  else
    _files
    [[ -n $cur ]] || compadd -- ${=flags}
  fi
}

# Loaded from a folder of fpath, the file itself is the function.
if [[ $funcstack[1] == _lmm_r1 ]]; then
  _lmm_r1 "$@"
else
  compdef _lmm_r1 lmm-r1
fi
