"""Command line: thin; parses, resolves the configuration and calls the packages below."""
