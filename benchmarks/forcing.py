"""Teacher forcing through a real engine: a logit processor that makes each request say given tokens and writes down what it would have said."""

from __future__ import annotations

import json
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class ForceTokens(CustomLogitProcessor):  # type: ignore[misc]
    """``custom_params``: ``force`` token ids in order; ``out`` a file that gets one JSON line when all are said; ``sample`` its name there.

    A line holds, for every forced token, its log-probability and whether it was the argmax.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Overwrite ``logits [B, V]`` so that greedy sampling says the next forced token of each request."""
        logprobs = torch.log_softmax(logits.float(), -1)
        for row, params in enumerate(custom_param_list or []):
            said = params.setdefault("said", [])
            at = len(said)
            if at < len(params["force"]):
                token = params["force"][at]
                said.append((float(logprobs[row, token]), int(logits[row].argmax()) == token))
                if len(said) == len(params["force"]):
                    with open(params["out"], "a", encoding="utf-8") as file:
                        file.write(json.dumps({"sample": params["sample"], "said": said}) + "\n")
                logits[row] = float("-inf")
                logits[row, token] = 0.0
        return logits
