"""Small levels with optima derived by hand, and searches over the rules alone to hold the solver against."""

from collections import deque

from lmm_r1.tasks.sokoban.board import MOVES
from lmm_r1.tasks.sokoban.notation import read_state

ONE_PUSH = "#####\n#@$.#\n#####"
# L pushes the box left, U and L walk around it, D pushes it down: 4 moves, 2 of them pushes.
CORNER = "######\n#    #\n# $@ #\n#.   #\n######"
# The box must go left, and the player can't get to its right.
WRONG_SIDE = "#######\n#@ .$ #\n#######"
IN_A_CORNER = "#####\n#$ @#\n# . #\n#####"
# Neither box is on a dead square; side by side at the wall they hold each other.
FROZEN = "######\n#.$$.#\n#  @ #\n######"


def level(text):
    return read_state(text)


def shortest(state, *, fewest):
    """The cost of the best solution, by plain search over single moves; None where there is none."""
    costs = {state: 0}
    waiting = deque([state])
    while waiting:
        current = waiting.popleft()
        if current.is_solved:
            return costs[current]
        for move in MOVES:
            following = current.after(move)
            added = int(current.is_push(move)) if fewest == "pushes" else 1
            if following is None or costs.get(following, costs[current] + added + 1) <= costs[current] + added:
                continue
            costs[following] = costs[current] + added
            # Steps of no cost go first, so that the cheapest state is always looked at next.
            waiting.append(following) if added else waiting.appendleft(following)
    return None
