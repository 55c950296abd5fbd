"""Example inputs for models that only look like transformers models: none is imported."""

import types

import pytest
import torch

from sparsify.errors import CaptureError
from sparsify.passes.examples import example_inputs, is_transformers_model


class PreTrainedModel(torch.nn.Module):
    main_input_name = "input_ids"

    def __init__(self, **config):
        super().__init__()
        self.config = types.SimpleNamespace(vocab_size=50, **config)
        self.weight = torch.nn.Parameter(torch.zeros(1))


class Decoder(PreTrainedModel):
    def forward(self, input_ids, attention_mask=None, use_cache=True):
        return input_ids


class Encoder(PreTrainedModel):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


class Both(PreTrainedModel):
    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, use_cache=True):
        return input_ids


class Vision(PreTrainedModel):
    main_input_name = "pixel_values"

    def forward(self, pixel_values):
        return pixel_values


def test_they_are_told_by_the_name_of_a_base_class():
    assert is_transformers_model(Decoder())
    assert not is_transformers_model(torch.nn.Linear(2, 2))


def test_a_decoder_gets_ids_a_padding_mask_and_no_cache():
    inputs = example_inputs(Decoder())
    assert list(inputs) == ["input_ids", "attention_mask", "use_cache"]
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (2, 16)
    assert inputs["input_ids"].max() < 50 and inputs["use_cache"] is False
    assert inputs["attention_mask"].dtype == torch.int64
    assert 0 < inputs["attention_mask"][0].sum() < 16 == inputs["attention_mask"][1].sum()


def test_only_what_the_forward_takes():
    assert "use_cache" not in example_inputs(Encoder())
    both = example_inputs(Both(is_encoder_decoder=True))
    assert both["decoder_input_ids"].shape == (2, 16)
    assert "decoder_input_ids" not in example_inputs(Both(is_encoder_decoder=False))


def test_lengths():
    assert example_inputs(Decoder(), seq_len=5)["input_ids"].shape == (2, 5)
    assert example_inputs(Decoder(max_position_embeddings=9))["input_ids"].shape == (2, 9)
    assert example_inputs(Decoder(), seq_len=1)["attention_mask"].tolist() == [[1], [1]]


def test_other_inputs_must_be_given():
    with pytest.raises(CaptureError, match="takes pixel_values"):
        example_inputs(Vision())


def test_inputs_lie_on_the_device_of_the_model():
    assert example_inputs(Decoder().to("meta"))["input_ids"].is_meta
