"""A language model as judge: what it is asked, over which connection, what is kept of it, and what happens without it."""
