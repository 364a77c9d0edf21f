"""Responses to rows, in training and outside of it: prompts encoded, engines started and asked, groups generated."""
