"""Forms of replies: grammars, JSON schemas, and the matchers that follow them."""
