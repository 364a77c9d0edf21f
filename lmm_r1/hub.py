"""Whether the Hugging Face hub can be reached, so that a name that is nowhere is told at once."""

import functools

TIMEOUT_SECONDS = 5.0


@functools.cache
def is_reachable() -> bool:
    """Ask the hub once; where it does not answer, Hugging Face's libraries are told to keep to their caches.

    Otherwise they ask six times, over half a minute, for each file that is not in the cache.
    """
    import httpx
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except httpx.TransportError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return False
    return True
