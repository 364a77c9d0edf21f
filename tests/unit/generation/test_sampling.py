from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.request import sampling_params


def test_a_group_is_streamed_without_text():
    parameters = sampling_params(
        SamplingSettings(n_samples=3, temperature=0.5, top_p=0.9, max_new_tokens=None),
        max_tokens=7,
        end_token_id=5,
        output_per="response",
        logprobs=True,
        ignore_eos=False,
    )
    assert (parameters.n, parameters.temperature, parameters.top_p) == (3, 0.5, 0.9)
    assert (parameters.max_tokens, parameters.logprobs) == (7, 0)
    # At a first token vLLM would mask the end token, which the training forward does not.
    assert parameters.min_tokens == 0
    assert parameters.stop_token_ids == [5]
    # The workers ban tokens.
    assert parameters.logit_bias is None
    # An output when a response begins, and one when it ends.
    assert (parameters.output_kind, parameters.stream_interval) == (RequestOutputKind.DELTA, 7)
    assert parameters.detokenize is False


def for_training(max_tokens: int, **settings: bool) -> SamplingParams:
    sampling = SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=max_tokens)
    return sampling_params(sampling, max_tokens=max_tokens, end_token_id=5, output_per="response", **settings)


def test_a_response_runs_to_its_full_length_where_the_end_is_ignored():
    parameters = for_training(7, logprobs=False, ignore_eos=True)
    assert parameters.ignore_eos
    assert parameters.stop_token_ids == []
    parameters.update_from_generation_config({"eos_token_id": [5, 6]}, eos_token_id=5)
    assert parameters.stop_token_ids == []
    assert parameters.eos_token_id is None


def test_the_likeliest_tokens_alone_are_sampled_where_asked_for():
    def top_k(**given: int) -> int:
        sampling = SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=1, **given)
        return sampling_params(sampling, max_tokens=1, end_token_id=5, output_per="response").top_k

    assert top_k(top_k=20) == 20
    # vLLM's word for all of them.
    assert top_k() in (-1, 0)
