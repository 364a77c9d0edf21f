"""Tools around the core, which never imports them."""
