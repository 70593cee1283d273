"""Models on disk: fetch what a reference names, unpack it, compare vocabularies, list what is there."""
