"""The demo that ships: a chart corpus, a tiny trained target and sample prompts."""
