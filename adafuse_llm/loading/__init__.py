"""Load members from names, folders and configuration files.

specs         `MemberSpec`: what a member is loaded from, and how
checkpoint    check the files and the weights of a checkpoint
members       check and load members of all kinds
huggingface   load transformers models
gguf          find and load GGUF models
servers       connect to members that inference servers run
server_urls   addresses of such members
problems      what errors of loading say
config_file   configuration files of ensembles
"""
