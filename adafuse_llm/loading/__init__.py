"""Load members from names, folders and configuration files.

specs         what a member is loaded from, and how: three kinds of members
members       check and load members of all kinds
huggingface   load transformers models
gguf          find and load GGUF models
servers       connect to members that inference servers run
problems      what errors of loading say
config_file   configuration files of ensembles
"""
