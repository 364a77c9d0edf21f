"""Models built from flat keywords, instead of the settings of a run."""

from typing import Any, Literal

from lmm_r1.config.shared import LoraConfig
from lmm_r1.models.actor import KitActor
from lmm_r1.models.loading import LoadSettings
from lmm_r1.models.value_model import KitValueModel

_LORA = {"lora_rank": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
_LORA |= {name: name for name in ("target_modules", "use_dora", "use_rslora")}
_OWN = ("temperature", "ban_media_tokens", "ds_config", "empty", "value_head_prefix", "normalize_reward")


def flat_settings(given: dict[str, Any]) -> tuple[LoadSettings, dict[str, Any]]:
    """Return the settings, and what a model's constructor takes next to them."""
    lora = LoraConfig(**{_LORA[name]: value for name, value in given.items() if name in _LORA})
    loaded = {name: value for name, value in given.items() if name not in _LORA and name not in _OWN}
    return LoadSettings(**loaded, lora=lora), {name: given[name] for name in _OWN if name in given}


def flat_actor(path: str, **given: Any) -> KitActor:
    settings, own = flat_settings(given)
    return KitActor(path, settings, **own)


def flat_value_model(path: str, kind: Literal["critic", "reward"], **given: Any) -> KitValueModel:
    settings, own = flat_settings(given)
    return KitValueModel(path, kind, settings, **own)
