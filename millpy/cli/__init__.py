"""The commands of the command line, one module each; `millpy.cli.app` imports those that are named."""
