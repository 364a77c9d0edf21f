"""What a run does with its plan when it starts, and the command that prints one, on a tiny model."""

import io

import pytest
from rich.console import Console

from lmm_r1 import cpu, dotted
from lmm_r1.cli import main
from lmm_r1.config import DPOConfig, PPOConfig, SFTConfig, resolve, unplanned
from lmm_r1.errors import UserError
from lmm_r1.models.actor import KitActor
from lmm_r1.tools.planning import choices
from lmm_r1.tools.planning.choices import planned
from lmm_r1.tools.planning.plan import GIB, Machine, Plan, _measured
from lmm_r1.tools.planning.run_plan import plan_ppo, plan_supervised


@pytest.fixture
def rl_run(tiny_checkpoint):
    """A function from further flags to the settings of a run without a reference model."""

    def settings(**flags: object) -> PPOConfig:
        given = {
            "actor.model_name_or_path": str(tiny_checkpoint("llm")),
            "actor.num_gpus_per_node": 1,
            "data.prompt_dataset": "rows.jsonl",
            "data.max_len": 1024,
            "reward.remote_url": "http://127.0.0.1:1",
            "rollout.n_samples_per_prompt": 4,
            "rollout.max_new_tokens": 256,
            "algo.kl.init_coef": 0.0,
            "ds.param_dtype": "fp32",
            # By default it has the time in it, to the minute.
            "logger.wandb.run_name": "planned",
        }
        return resolve(
            dotted.replace(PPOConfig(), given | {name.replace("__", "."): value for name, value in flags.items()})
        )

    return settings


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch):
    """A function that makes this a machine with so many GiB and no GPU."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("LMM_R1_VERBOSE", "1")

    def give(size: float) -> None:
        machine = Machine(gpu_bytes=None, host_bytes=int(size * GIB))
        monkeypatch.setattr(choices, "machine_of", lambda **given: machine)

    return give


def told(config: PPOConfig) -> tuple[PPOConfig, str]:
    text = io.StringIO()
    return planned(config, console=Console(file=text, width=300)), text.getvalue()


def test_a_run_says_what_it_takes_and_its_passes_are_as_large_as_ever(rl_run, with_memory, monkeypatch):
    with_memory(24)
    config, said = told(rl_run())
    first, second = said.splitlines()
    monkeypatch.delenv("LMM_R1_VERBOSE")
    assert told(rl_run())[1] == f"{first}\n"
    assert first.startswith("memory, predicted: a machine's memory ")
    assert first.endswith(" GiB of 24.0 GiB")
    # 768 tokens are the longest prompt; four responses of up to 256 fit beside it.
    assert second == "passes of the update: 16,192 tokens"
    # Without a GPU nothing else is chosen: it is as it always was.
    assert config == unplanned(rl_run(train__max_tokens_per_gpu=16192))
    assert (config.actor.gradient_checkpointing_enable, config.ds.zero_stage) == (False, 2)


def test_with_lora_the_plan_has_no_second_copy_of_the_weights_as_reference(rl_run, tiny_checkpoint):
    def plan(**flags: object) -> Plan:
        config = rl_run(ds__lora__rank=4, train__colocate_all=True, vllm__gpu_memory_utilization=0.5, **flags)
        return plan_ppo(config, Machine(gpu_bytes=24 * GIB, host_bytes=64 * GIB))

    base = plan(algo__kl__init_coef=0.1).devices[0]
    assert [model.role for model in base.models] == ["policy"]
    assert base.phases() == plan().devices[0].phases()


def test_passes_get_smaller_where_memory_is_short_and_what_is_given_is_kept(rl_run, with_memory):
    with_memory(24)
    base = rl_run(data__max_len=256, rollout__max_new_tokens=64)
    plan = choices.plan_ppo(base, Machine(gpu_bytes=None, host_bytes=24 * GIB))
    (device,) = plan.devices
    (policy,) = device.models
    beside = plan.host_peak - policy.busy() + policy.busy(5000)
    with_memory(beside / GIB)
    config, _ = told(base)
    # A multiple of 256, and never more than fits.
    assert config.train.max_tokens_per_gpu == 4864
    given, _ = told(dotted.replace(base, {"train.max_tokens_per_gpu": 1000}))
    assert given.train.max_tokens_per_gpu == 1000
    with pytest.raises(UserError, match="^the run cannot fit: a machine's memory would hold .* It fits with --"):
        told(dotted.replace(base, {"train.max_tokens_per_gpu": 16000}))


def test_a_run_that_cannot_fit_is_refused_and_one_in_a_cluster_is_not_checked(rl_run, with_memory, monkeypatch):
    with_memory(1)
    with pytest.raises(UserError, match="^the run cannot fit: .* take more GPUs, a machine with more memory"):
        told(rl_run())
    config = rl_run()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert told(config) == (unplanned(config), "")


def test_a_run_whose_model_cannot_be_run_without_memory_goes_on_unchecked(rl_run, with_memory, caplog, monkeypatch):
    with_memory(1)
    _measured.cache_clear()

    def forward(self, *given: object, **settings: object) -> None:
        raise RuntimeError("no kernel for fake tensors\nand more lines")

    monkeypatch.setattr(KitActor, "forward", forward)
    config = rl_run()
    assert told(config) == (unplanned(config), "")
    (record,) = caplog.records
    assert record.message == (
        "the memory of this model's passes cannot be predicted (RuntimeError: no kernel for fake tensors); it is not checked"
    )
    _measured.cache_clear()


def test_a_supervised_run_is_checked_as_well(tiny_checkpoint, with_memory):
    flags = {"model.model_name_or_path": str(tiny_checkpoint("llm")), "data.dataset": "rows", "ds.param_dtype": "fp32"}
    config = resolve(dotted.replace(SFTConfig(), flags))
    text = io.StringIO()
    with_memory(8)
    planned(config, console=Console(file=text, width=300))
    assert "the longest sample has 2,048" in text.getvalue()
    with_memory(0.5)
    with pytest.raises(UserError, match="^the run cannot fit"):
        planned(config, console=Console(quiet=True))


def test_a_run_on_pairs_is_planned_with_its_reference_and_two_samples_to_a_row(tiny_checkpoint):
    flags = {"model.model_name_or_path": str(tiny_checkpoint("llm")), "data.dataset": "rows", "ds.param_dtype": "fp32"}

    def plan(zero_stage: int = 2, **more: object) -> Plan:
        given = {name.replace("__", "."): value for name, value in more.items()} | {"ds.zero_stage": zero_stage}
        config = resolve(dotted.replace(DPOConfig(), flags | given))
        gpus = Machine(gpu_bytes=24 * GIB, host_bytes=64 * GIB)
        return plan_supervised(config, gpus, processes=4, per_machine=4)

    policy, reference = plan().devices[0].models
    weights = policy.size.weight_bytes
    assert [policy.role, reference.role] == ["policy", "reference"]
    assert policy.pass_tokens == reference.pass_tokens == 2 * 2048
    assert plan().longest == 2048
    # The policy's process is the reference's.
    assert (reference.resident, reference.context, reference.states) == (weights, 0, None)
    assert plan(3).devices[0].models[1].resident == -(-weights // 4)
    offloaded = plan(3, ref__offload=True)
    assert (offloaded.devices[0].models[1].resident, offloaded.devices[0].models[1].host) == (0, -(-weights // 4))
    assert "reference, offloaded" in offloaded.host
    for alone in (plan(ds__lora__rank=4), plan(model__simpo_enable=True)):
        assert [model.role for model in alone.devices[0].models] == ["policy"]


@pytest.mark.usefixtures("own_environment")
def test_the_command_prints_a_table_and_refuses_what_cannot_fit(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(cpu, "prepare_process", lambda: None)
    flags = ["--actor.model_name_or_path", str(tiny_checkpoint("llm")), "--ds.param_dtype", "fp32"]
    flags += ["--train.colocate_all", "--rollout.n_samples_per_prompt", "4", "--host_memory_gib", "64"]
    one = ["--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1"]
    main(["plan", *flags, *one, "--gpu_memory_gib", "80", "--vllm.gpu_memory_utilization", "0.5"])
    said = capsys.readouterr().out
    assert "each GPU of policy and reference" in said
    assert "update of the policy" in said
    # As large as they may be: all of it is free.
    assert "passes of the update: 65,536 tokens" in said
    assert "GPUs: 1 (actor + ref + engines 1)" in said
    ahead = [flag for flag in flags if flag != "--train.colocate_all"] + ["--train.async_enable"]
    main(["plan", *ahead, *one, "--vllm.num_engines", "2", "--gpu_memory_gib", "80"])
    said = capsys.readouterr().out
    assert "GPUs: 4 (actor 1, ref 1, engines 2)" in said
    # What a run refuses is refused before.
    with pytest.raises(SystemExit):
        main(["plan", *flags, *one, "--train.async_enable", "--gpu_memory_gib", "80"])
    assert "engines and policy would take turns on the same GPUs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", *ahead, "--actor.num_gpus_per_node", "999", "--ref.num_gpus_per_node", "1"])
    assert "of which each rank takes one" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *flags, *one, "--gpu_memory_gib", "80", "--vllm.gpu_memory_utilization", "0.99"])
    assert stopped.value.code == 1
    assert "It fits with --vllm.gpu_memory_utilization 0.7" in capsys.readouterr().err
    sft = ["--model.model_name_or_path", str(tiny_checkpoint("llm")), "--ds.param_dtype", "fp32", "--num_gpus", "8"]
    main(["plan", "train_sft", *sft, "--gpu_memory_gib", "24", "--host_memory_gib", "64"])
    assert "the longest sample has 2,048" in capsys.readouterr().out
    main(["plan", "train_dpo", *sft, "--gpu_memory_gib", "24", "--host_memory_gib", "64"])
    assert "passes of the reference" in capsys.readouterr().out
    teacher = ["--teacher.model_name_or_path", str(tiny_checkpoint("llm"))]
    main(["plan", "train_kd", *sft, *teacher, "--gpu_memory_gib", "24", "--host_memory_gib", "64"])
    assert "passes of the teacher" in capsys.readouterr().out
    main(["plan", "train_rm", *sft, "--gpu_memory_gib", "24", "--host_memory_gib", "64"])
    assert "update of the critic" in capsys.readouterr().out
