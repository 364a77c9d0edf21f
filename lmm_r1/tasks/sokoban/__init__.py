"""Sokoban: its rules and notations, a solver, a generator of levels, boards as pictures, and plans as policies write them."""
