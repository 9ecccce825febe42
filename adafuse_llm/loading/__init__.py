"""Load members from names, folders and configuration files."""
