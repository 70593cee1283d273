"""DuoChat: chat that drafts on the CPU and verifies on the GPU at the same time (DuoDecoding, arXiv 2503.00784)."""

__version__ = "0.1.0"


class DuoChatError(Exception):
    """A fault that the user can mend. The message is one sentence that names the fault and the remedy."""
