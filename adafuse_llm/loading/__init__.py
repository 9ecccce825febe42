"""Load members from names, folders and configuration files.

specs         descriptions of members to load: three kinds
members       check and load members of all kinds
huggingface   load transformers models
gguf          find and load GGUF models
servers       connect to members that inference servers run
problems      texts for errors of loading
config_file   configuration files of ensembles
"""
