"""Responses of a checkpoint outside of training: engines, files of rows, scores, and what is selected from them."""
