"""Forms of replies: grammars, JSON schemas, and the matchers that read replies by them."""
