"""Child process of test_engine: generate with vLLM on CPU and print every draft that it makes.

Arguments: target directory, drafter directory, a JSON list of prompt token ids, tokens to generate.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    target, drafter, prompt, count = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.dflash import DFlashProposer

    from eval.vllm_dflash_cpu import install

    install(vllm.__version__, candidates=True)
    drafts = []
    propose = DFlashProposer.propose

    def spy(self, *args, **kwargs):
        result = propose(self, *args, **kwargs)
        drafts.append(result[0].tolist())
        return result

    DFlashProposer.propose = spy
    config = json.loads((Path(drafter) / "config.json").read_text())
    engine = LLM(
        model=target,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config={
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": config["block_size"] - 1,
        },
    )
    drafts.clear()  # profiling runs draft too
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    output = engine.generate([{"prompt_token_ids": prompt}], sampling)[0]
    print("RESULT " + json.dumps({"tokens": list(output.outputs[0].token_ids), "drafts": drafts}))


if __name__ == "__main__":
    main()
