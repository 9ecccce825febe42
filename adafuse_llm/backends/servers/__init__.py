"""Members that an inference server runs: vLLM, SGLang or llama-server.

api           questions about distributions, and their answers
connection    HTTP calls to one server: keys, time limits, repeated attempts
vllm          the API of vLLM
sglang        the API of SGLang
llama_server  the API of llama.cpp's server
backend       the member
"""
