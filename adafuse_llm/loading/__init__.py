"""From names, folders and configuration files to loaded members."""
