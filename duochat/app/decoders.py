"""How people read of the decoders: name and one line each, for the drawer, the race and the page's scripts."""

DECODERS = {
    "duotree": (
        "DuoTree",
        "Both at once. Guesses grow as a tree that lives on from round to round, also for rejections.",
    ),
    "duodecoding": (
        "DuoDecoding",
        "Both at once, as in the paper: the budget fits the hardware, several short chains.",
    ),
    "speculative": ("Speculative", "In turns: the draft guesses a few tokens, then the target checks them."),
    "autoregressive": ("Plain", "The target alone, one token at a time. The measure for all others."),
}
NAMES = {key: name for key, (name, _) in DECODERS.items()}
