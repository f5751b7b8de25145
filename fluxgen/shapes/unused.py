"""Keys of a config that may change the shapes and that no rule has looked at.

A config says more than the rules know: a shared expert under a new name would be left out of the
list without a word. So what was not looked at, has a telling name and is set, is named.
"""

from __future__ import annotations

import re

from fluxgen.shapes.keys import Section

__all__ = ["unused_keys"]

_TELLING = re.compile(
    r"expert|moe|shared|lora_rank|low_rank|latent|altup|laurel|mamba|ssm|residual_mlp|"
    r"linear_(num|key|value)|num_kv|kv_heads|_heads$|intermediate|ffn|mlp_(dim|width|hidden_size)|"
    r"inner_(dim|size)|head_dim|per_layer|layers_block|mixer"
)
# Routing, losses, scaling, placement, kernels, sizes of states: nothing of a weight GEMM.
_HARMLESS = re.compile(
    r"per_tok|top_?k|topk|_k$|router|routed|routing|gate_|gating|score|scoring|norm|loss|aux|"
    r"capacity|jitter|dropout|drop|bias|act$|activation|_fn$|init|std|eps|dtype|kernel|conv|chunk|"
    r"cache|offload|parallel|backend|impl|world|ep_|_ep|tp_|overlap|dt_|time_step|scal|mult|factor|"
    r"alpha|beta|theta|rope|rotary|window|vision|audio|image|video|token|name|type|version|group$|"
    r"n_group|num_expert_group|correction|use_|enable|output_|return_|quant|pattern|interval|"
    r"indexer|index_|nope|zero_expert|expert_swiglu_limit|swiglu_limit|attn_logit|softcap|sparsity|"
    r"expand|_rms|scan|num_nextn|mtp|max_|freq"
)
# Of an unknown type, whatever says that layers differ or that there is one more block.
_STRONG = re.compile(
    r"shared|residual|mlp_res|dense|sparse_step|only_layers|compression|_rank$|expert_interval|"
    r"^(n|num|moe_num)_.*experts?(_|$)"
)
_SCALARS = re.compile(
    r"mult|scal|drop|dtype|fp32|loss|coef|alpha|eps|init|std|norm|per_tok|group|bias|token|"
    r"selected|active|top|vision|audio|share_"
)


def unused_keys(config: Section, unknown: bool) -> list[str]:
    """Names of such keys, sorted.

    Args:
        config: the language model's section, after all rules. unknown: whether its type is unknown,
            and the rules are the generic ones: then keys that only some models read count too.
    """
    found = []
    for key, value in config.data.items():
        if not isinstance(key, str) or key in config.used:
            continue
        telling = _TELLING.search(key) and not _HARMLESS.search(key)
        if not telling and not (unknown and _STRONG.search(key) and not _SCALARS.search(key)):
            continue
        if value in (None, False, 0, 0.0) or value in ([], {}) or isinstance(value, str):
            continue
        if value == 1 and not unknown:  # a single group or input changes nothing
            continue
        found.append(key[:60])
    return sorted(found)
