"""When two answers are the same: how one is found in a response, read, and compared with the gold answer."""
