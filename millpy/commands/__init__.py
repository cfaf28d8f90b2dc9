"""Commands of the command line, one module each; `millpy.cli` registers them."""
