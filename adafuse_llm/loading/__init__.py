"""Load members from names, folders and configuration files.

specs         `MemberSpec`: what a member is loaded from, and how
checkpoint    check the files and the weights of a checkpoint
members       load models, and divide the devices' memory among them
quantization  what a quantization configuration means for loading
config_file   configuration files of ensembles
"""
