# shellcheck shell=bash
# Sourced by common.sh: a reward service of the script's own, on a free port, until the script ends.
#   REWARD_URL     /get_reward of a service that is already running; empty: one is started here
#   REWARD_HOST    address of this machine that it listens on; other nodes of a run do not reach the default
#   REMOTE_RM_TOKEN  key of the service; made here if it is empty. On a cluster, export one before Ray starts on its nodes.
#   REWARD_WAIT_S  seconds that it may take to start
: "${REWARD_URL:=}"
: "${REWARD_HOST:=127.0.0.1}"
: "${REWARD_WAIT_S:=120}"
REWARD_FOLDER=

start_reward_service() {
  if [[ -z $REWARD_URL && $DRY_RUN == 1 ]]; then
    REWARD_URL=http://$REWARD_HOST:PORT/get_reward
  fi
  [[ -z $REWARD_URL ]] || return 0
  REWARD_FOLDER=$(mktemp -d)
  : "${REMOTE_RM_TOKEN:=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')}"
  export REMOTE_RM_TOKEN
  "$PYTHON" -m remote_rm.math_verifier --host "$REWARD_HOST" --port 0 --port-file "$REWARD_FOLDER/port" \
    --token-env REMOTE_RM_TOKEN >"$REWARD_FOLDER/log" 2>&1 &
  local deadline=$((SECONDS + REWARD_WAIT_S))
  until [[ -s $REWARD_FOLDER/port ]] && answers "http://$REWARD_HOST:$(<"$REWARD_FOLDER/port")/health"; do
    if ! kill -0 "$!" 2>/dev/null || ((SECONDS > deadline)); then
      echo "the reward service did not start:" >&2
      cat "$REWARD_FOLDER/log" >&2
      exit 1
    fi
    sleep 0.2
  done
  REWARD_URL="http://$REWARD_HOST:$(<"$REWARD_FOLDER/port")/get_reward"
}

answers() {
  "$PYTHON" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null
}
