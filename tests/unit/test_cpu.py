"""What a machine without CUDA needs; `is_available` is set in both directions, so that it holds on any machine."""

import os
from types import SimpleNamespace

import pytest
import torch

from lmm_r1 import cpu
from lmm_r1.cluster import run_environment
from lmm_r1.host import strategy


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without CUDA whose `torch.cuda` is put back after the test."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)


@pytest.mark.usefixtures("without_cuda")
def test_without_cuda_tensors_are_the_cpus_and_nothing_waits_for_a_gpu():
    cpu.prepare_worker()
    assert cpu.device() == torch.device("cpu")
    assert torch.cuda.synchronize() is None


def test_with_cuda_nothing_is_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.synchronize
    cpu.prepare_worker()
    cpu.prepare_process()
    strategy.prepare_training()
    assert torch.cuda.synchronize is before
    assert cpu.worker_environment() == {cpu.BACKEND: "cuda"}


@pytest.mark.usefixtures("without_cuda")
def test_workers_get_an_environment_of_their_own():
    environment = cpu.worker_environment()
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert all(isinstance(value, str) for value in environment.values())
    environment.clear()
    assert cpu.worker_environment()[cpu.BACKEND] == "cpu"


@pytest.mark.usefixtures("without_cuda")
def test_what_the_user_has_set_stays(monkeypatch):
    environment = {"VLLM_CPU_KVCACHE_SPACE": "7"}
    monkeypatch.setattr(os, "environ", environment)
    cpu.prepare_process()
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    # What is found out here is for workers: this process can ask again.
    of_libraries = {"PYTHONWARNINGS", "PYTHONPATH"}
    assert environment.keys() - of_libraries == cpu.worker_environment().keys() - {cpu.BACKEND}


@pytest.mark.parametrize(
    ("environment", "own_process"),
    [
        ({cpu.BACKEND: "cpu"}, False),
        ({cpu.BACKEND: "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, False),
        ({cpu.BACKEND: "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, True),
        # OpenRLHF sets it to 0 for full determinism, and its engine is a process in spite of it.
        ({cpu.BACKEND: "cuda", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, True),
    ],
)
def test_an_engine_is_a_process_of_its_own_on_gpus_and_where_the_user_asks_for_it(
    environment, own_process, monkeypatch
):
    monkeypatch.setattr(os, "environ", environment)
    assert cpu.engine_process() is own_process


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_worker_takes_the_drivers_word_and_does_not_ask_cuda(monkeypatch, backend):
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asking initialises CUDA"))
    monkeypatch.setenv(cpu.BACKEND, backend)
    before = torch.cuda.synchronize
    cpu.prepare_worker()
    assert cpu.has_cuda() == (backend == "cuda")
    assert (torch.cuda.synchronize is before) == (backend == "cuda")
    assert cpu.worker_environment()[cpu.BACKEND] == backend


@pytest.mark.usefixtures("without_cuda")
def test_a_driver_follows_its_workers_in_what_they_do_and_not_in_what_it_does_itself(monkeypatch):
    monkeypatch.delenv(cpu.BACKEND, raising=False)
    try:
        cpu.follow_workers(True)
        assert (cpu.has_cuda(), cpu.own_cuda()) == (True, False)
        assert cpu.worker_environment() == {cpu.BACKEND: "cuda"}
        environment: dict[str, str] = {}
        monkeypatch.setattr(os, "environ", environment)
        before = torch.cuda.synchronize
        cpu.prepare_process()
        assert environment["DS_ACCELERATOR"] == "cpu"
        assert torch.cuda.synchronize is not before
    finally:
        cpu.follow_workers(None)
    assert not cpu.has_cuda()


@pytest.mark.usefixtures("without_cuda")
def test_a_request_with_a_seed_begins_anew_where_its_prompt_is_read_in_parts(monkeypatch):
    """vLLM turns its generator back by an offset, which a CPU's does not have."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    seen: list[object] = []
    monkeypatch.setattr(CPUModelRunner, "_lmm_r1_bookkeeping", None, raising=False)
    monkeypatch.delattr(CPUModelRunner, "_lmm_r1_bookkeeping")
    monkeypatch.setattr(
        CPUModelRunner, "_bookkeeping_sync", lambda self, what: seen.append((dict(self.input_batch.generators), what))
    )
    cpu._take_seeds()
    cpu._take_seeds()
    in_part, whole = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first = torch.rand(2, generator=in_part)
    torch.rand(2, generator=whole)
    generators = {0: in_part, 2: whole}
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=3, generators=generators),
        discard_request_mask=SimpleNamespace(np=torch.tensor([True, True, False, True]).numpy()),
    )
    CPUModelRunner._bookkeeping_sync(runner, "output")
    assert seen == [({}, "output")]
    assert runner.input_batch.generators is generators
    assert torch.equal(torch.rand(2, generator=in_part), first)
    assert not torch.equal(torch.rand(2, generator=whole), first)


@pytest.mark.usefixtures("without_cuda", "own_environment")
@pytest.mark.parametrize(("used", "spins"), [(0.019, "300000"), (0.013, "0")])
def test_threads_look_for_one_another_on_free_cores_and_sleep_beside_other_work(used, spins, monkeypatch):
    monkeypatch.setitem(cpu._ENVIRONMENT, "OMP_NUM_THREADS", "2")
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    clock, busy = iter((0.0, 0.02, 0.02)), iter((0.0, used))
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: next(clock), thread_time=lambda: next(busy)))
    cpu.choose_waiting()
    assert os.environ["GOMP_SPINCOUNT"] == spins
    assert cpu.worker_environment()["GOMP_SPINCOUNT"] == "300000", "of workers on other machines"
    assert run_environment()["GOMP_SPINCOUNT"] == spins


@pytest.mark.usefixtures("without_cuda")
def test_how_threads_wait_is_the_users_choice_and_none_where_there_is_one_thread(monkeypatch):
    monkeypatch.setitem(cpu._ENVIRONMENT, "OMP_NUM_THREADS", "2")
    monkeypatch.setattr(cpu, "time", None)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": "active"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            cpu.choose_waiting()
            expected = {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "300000"}.get(name)
            assert run_environment().get("GOMP_SPINCOUNT") == expected, "a policy is not overruled"


def test_guessed_tokens_are_sampled_by_the_temperature_of_their_request(monkeypatch):
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    monkeypatch.setattr(rejection_sampler, "expand_kernel", None)
    cpu._mend_guesses()
    # As a worker does when it starts.
    CPUModelRunner._postprocess_triton(None)
    # Two guesses of the first request, none of the second, three of the third; greedy requests are divided by 1.
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperatures = torch.tensor([0.5, 0.7, 0.0])
    expanded = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 5, replace_from=0, replace_to=1)
    assert expanded.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    top_k = rejection_sampler.expand_batch_to_tokens(torch.tensor([3, 4, 5], dtype=torch.int32), ends, 5)
    assert top_k.tolist() == [3, 3, 5, 5, 5]
