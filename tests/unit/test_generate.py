"""Generation: the cached path equals running the whole sequence again, and the sampler keeps what it should."""

import pytest
import torch

from automimo.attention import KVCache
from automimo.errors import CheckpointError, ConfigError, DataError
from automimo.generate import Sampling, choose, generate
from automimo.mimo_v2_flash.model import MiMoV2FlashForCausalLM
from automimo.mimo_v2_flash.presets import preset_config


@pytest.fixture(scope="module")
def model() -> MiMoV2FlashForCausalLM:
    torch.manual_seed(0)
    config = preset_config(
        "tiny", vocab_size=97, sliding_window=8, num_hidden_layers=4, hybrid_layer_pattern=[0, 1, 1, 0]
    )
    model = MiMoV2FlashForCausalLM(config)
    model.initialize_weights(dtype=torch.float32)
    for block in model.model.layers.values():
        if block.self_attn.attention_sink_bias is not None:
            block.self_attn.attention_sink_bias.data.normal_()
    return model.eval()


def uncached(model: MiMoV2FlashForCausalLM, prompt: list[int], steps: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# Lengths around the window of 8, so that prompts are shorter than it, equal and longer.
PROMPTS = [[5], list(range(7)), list(range(8)), list(range(30, 39)), list(range(40))]


def test_greedy_equals_the_uncached_forward(model: MiMoV2FlashForCausalLM) -> None:
    new = generate(model, PROMPTS, Sampling(max_new_tokens=30), stop_ids=())
    assert new == [uncached(model, prompt, 30) for prompt in PROMPTS]


def test_logits_of_every_step_equal_the_uncached_forward(model: MiMoV2FlashForCausalLM) -> None:
    ids = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(1))
    cache = KVCache(4)
    with torch.no_grad():
        whole = model(ids.unsqueeze(0)).logits[0]
        model(ids[:20], cu_seqlens=torch.tensor([0, 20]), cache=cache)
        for position in range(20, 60):
            step = model(ids[position].view(1, 1), cache=cache).logits[0, 0]
            torch.testing.assert_close(step, whole[position], rtol=1e-5, atol=1e-5)


def test_sliding_layers_hold_only_their_window(model: MiMoV2FlashForCausalLM) -> None:
    def cached_bytes(tokens: int) -> int:
        cache = KVCache(4)
        with torch.no_grad():
            model(torch.zeros(tokens, dtype=torch.int64), cu_seqlens=torch.tensor([0, tokens]), cache=cache)
        return cache.nbytes()

    config = model.config
    per_token = 2 * config.num_key_value_heads * (config.head_dim + config.v_head_dim) * 4
    # Two full layers grow with the prompt; the two sliding ones do not (places are allocated in steps, hence >=).
    assert cached_bytes(4096) - cached_bytes(2048) == 2048 * per_token


def test_a_stop_id_ends_one_sequence_and_the_others_go_on(model: MiMoV2FlashForCausalLM) -> None:
    free = generate(model, PROMPTS, Sampling(max_new_tokens=12), stop_ids=())
    stop = free[1][3]
    expected = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in free]
    seen: list[tuple[int, int]] = []
    stopped = generate(
        model,
        PROMPTS,
        Sampling(max_new_tokens=12),
        stop_ids=[stop],
        on_token=lambda row, token: seen.append((row, token)),
    )
    assert stopped == expected
    assert [[token for row, token in seen if row == i] for i in range(len(PROMPTS))] == expected


def test_sampling_follows_its_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20000, -1)
    picked = choose(logits, Sampling(temperature=2.0), torch.Generator().manual_seed(0))
    share = torch.bincount(picked, minlength=4) / 20000
    # Four standard deviations of a binomial share with n = 20000 are below 0.0142.
    torch.testing.assert_close(share, (logits[0] / 2).softmax(-1), rtol=0, atol=0.0142)


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(5000, -1)
    generator = torch.Generator().manual_seed(0)
    assert set(choose(logits, Sampling(temperature=1.0, top_k=2), generator).tolist()) == {0, 1}
    # 0.4 + 0.3 reaches 0.6, so the third token is out.
    assert set(choose(logits, Sampling(temperature=1.0, top_p=0.6), generator).tolist()) == {0, 1}
    assert set(choose(logits, Sampling(temperature=1.0, top_p=1e-6), generator).tolist()) == {0}


def test_a_seed_repeats_and_another_differs(model: MiMoV2FlashForCausalLM) -> None:
    runs = [generate(model, [[1, 2]], Sampling(20, temperature=1.0, seed=seed), stop_ids=()) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_wrong_requests_are_refused(model: MiMoV2FlashForCausalLM) -> None:
    with pytest.raises(DataError, match="no tokens"):
        generate(model, [[1], []], Sampling(), stop_ids=())
    for wrong in (
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": 1e-320},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"seed": 2**64},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Sampling(**wrong)


def test_the_lowest_temperature_is_greedy() -> None:
    logits = torch.tensor([[-300.0, 300.0, 299.0]])
    assert choose(logits, Sampling(temperature=1e-6, seed=0), torch.Generator()).tolist() == [1]


def test_broken_weights_are_no_answer(model: MiMoV2FlashForCausalLM) -> None:
    good = model.lm_head.weight.data.clone()
    model.lm_head.weight.data[3, 0] = float("nan")
    try:
        with pytest.raises(CheckpointError, match="not finite"):
            generate(model, [[1, 2]], Sampling(), stop_ids=())
    finally:
        model.lm_head.weight.data.copy_(good)
