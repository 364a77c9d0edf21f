"""What a reward request holds beside OpenRLHF's keys, for servers of users that ask for it."""

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from helpers.conversations import message, picture, row

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError
from lmm_r1.scoring import Moment, ScoredResponse
from lmm_r1.scoring.sources import RowClient, make_scorer
from remote_rm.client import RewardClient

ADDRESS = "http://127.0.0.1:1/get_reward"
OPENRLHFS = {"query": ["<q>2"], "prompts": ['[{"role":"user","content":"1+1?"}]'], "labels": ["2"], "responses": ["2"]}
ROW = replace(row(message("user", "1+1?"), answer="2"), columns={"boxes": [[0, 1]], "level": "easy"})


def response(of=ROW) -> ScoredResponse:
    return ScoredResponse(
        row=of, prompt="p", query="<q>2", response="2", num_tokens=1, moment=Moment(step=3, held_out=False)
    )


def asked(*fields: str, of=ROW) -> dict[str, Any]:
    """The request of one response, as a server gets it."""
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"rewards": [0.5]})

    async def ask() -> float:
        app = web.Application()
        app.router.add_post("/get_reward", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/get_reward"
        scorer = make_scorer(RewardConfig(remote_url=url, request_fields=fields))
        (score,) = await scorer.rewards([response(of)])
        await scorer.close()
        await runner.cleanup()
        return score.reward

    assert asyncio.run(ask()) == 0.5
    (body,) = bodies
    return body


def test_only_openrlhfs_keys_are_sent_by_default():
    assert asked() == OPENRLHFS


def test_columns_and_step_are_lists_of_one_as_all_keys_are():
    assert asked("columns", "step") == {
        **OPENRLHFS,
        "columns": [{"boxes": [[0, 1]], "level": "easy"}],
        "datasources": ["test"],
        "steps": [3],
        "held_out": [False],
    }


def test_images_are_sent_as_they_are_stored_also_those_that_rows_hold_in_memory(tmp_path):
    picture(8, 4).save(tmp_path / "a.bmp")
    bitmap = (tmp_path / "a.bmp").read_bytes()
    shown = row(message("user", ImagePart(str(tmp_path / "a.bmp")), ImagePart(bitmap), picture(4, 4), "?"))
    (images,) = asked("images", of=shown)["images"]
    first, second, third = (base64.b64decode(image) for image in images)
    assert first == second == bitmap
    assert third.startswith(b"\x89PNG")
    assert asked("images")["images"] == [[]]


@pytest.mark.parametrize("value", [float("nan"), b"bytes", {1, 2}])
def test_a_column_that_json_has_no_form_for_is_told_before_anything_is_sent(value):
    rows = [ROW, replace(ROW, location="rows.jsonl, line 2", columns={"level": value})]
    client = RewardClient([ADDRESS])
    with pytest.raises(
        UserError, match="^rows.jsonl, line 2: the column level cannot be sent for --reward.request_fields"
    ):
        RowClient(client, fields=("columns",)).check_rows(rows)
    RowClient(client, fields=("step", "images")).check_rows(rows)
