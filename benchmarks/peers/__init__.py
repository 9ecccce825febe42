"""The strategies of other papers, with which AdaFuse is compared.

Each is a module of its own. Three are shared: `token_level` combines distributions of the next
token, `whole_answers` lets every member answer alone, and `pair_ranker` is a ranker for `rerank`.
"""
