"""Members that an inference server runs: vLLM, SGLang or llama-server.

api           what a backend asks a server, and what it gets
connection    HTTP calls to one server: keys, time limits, repetition
vllm          the API of vLLM
sglang        the API of SGLang
llama_server  the API of llama.cpp's server
backend       the member
"""
