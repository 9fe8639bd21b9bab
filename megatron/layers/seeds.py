"""Seeds that depend on names only, so that every rank and every layout draws the same numbers."""

from hashlib import blake2b


def stable_seed(*parts: str | int) -> int:
    """Return a 63-bit seed from a sequence of words and numbers.

    Python's own ``hash`` differs from process to process; this seed never does.

    Args:
        *parts: words and numbers that name the use, such as ``(seed, "output_layer.weight", 3)``.

    Returns:
        A non-negative integer below 2**63, which every generator of PyTorch accepts.
    """
    text = "\x1f".join(str(part) for part in parts)
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
