"""The results of an evaluation: as JSON, in a terminal and as a page."""

from lmm_r1.evaluation.scoreboard.board import Board, CheckpointResponses, MeasuredFile, board_record, build_board
from lmm_r1.evaluation.scoreboard.page import build_page
from lmm_r1.evaluation.scoreboard.terminal import print_board
