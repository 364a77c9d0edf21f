"""Reward requests that hold more of the row than OpenRLHF's keys, for servers that ask for it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence

from lmm_r1.config.ppo import RequestField
from lmm_r1.data.images import encoded_image
from lmm_r1.data.messages import Row, images_of, to_json
from lmm_r1.errors import UserError
from lmm_r1.scoring.scored_response import ScoredResponse
from remote_rm.client import RewardClient
from remote_rm.verifier import Score


class RowClient:
    """Scores one response at a time over HTTP, and sends what `--reward.request_fields` names.

    `columns`: `columns` (a JSON object) and `datasources`. `images`: `images`, base64 text of each as it is stored.
    `step`: `steps` and `held_out`. Each key holds a list of one entry per response, as OpenRLHF's do.
    """

    def __init__(self, client: RewardClient, *, fields: Sequence[RequestField]) -> None:
        self._client = client
        self._fields = fields

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row with a column that JSON has no form for."""
        if "columns" not in self._fields:
            return
        for row in rows:
            for name, value in row.columns.items():
                try:
                    json.dumps(value, allow_nan=False)
                except (TypeError, ValueError) as error:
                    raise UserError(
                        f"{row.location}: the column {name} cannot be sent as --reward.request_fields columns asks, since "
                        f"JSON has no form for it ({error}); change or drop it, or leave columns out"
                    ) from error

    async def reward_of(self, item: ScoredResponse) -> Score:
        """Return the reward of a response; raises RewardUnavailable, and UserError for an image that cannot be read."""
        return await self._client.reward(
            query=item.query,
            prompt=to_json(item.row.messages),
            label=item.row.answer,
            response=item.response,
            # Files are read, which must not hold up the engine's event loop.
            further=await asyncio.to_thread(self._further, item),
        )

    async def check_health(self) -> None:
        """Raise RewardUnavailable unless a reward server answers at every endpoint."""
        await self._client.check_health()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _further(self, item: ScoredResponse) -> dict[str, object]:
        row, moment = item.row, item.moment
        found: dict[str, object] = {"image_scales": item.image_scales} if item.image_scales else {}
        if "columns" in self._fields:
            found |= {"columns": dict(row.columns), "datasources": row.datasource}
        if "images" in self._fields:
            encoded = [encoded_image(part, location=row.location) for part in images_of(row.messages)]
            found["images"] = [base64.b64encode(image).decode("ascii") for image in encoded]
        if "step" in self._fields and moment is not None:
            found |= {"steps": moment.step, "held_out": moment.held_out}
        return found
