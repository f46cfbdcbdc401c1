"""The policy: a transformers causal language model and its optimizer.

`language_model` loads it, `packing` lays rollouts out with each prompt held once, `head` turns
hidden states into log-probabilities and gradients without ever holding all logits, `learner` owns
the fp32 masters and takes optimizer steps, `weights` and `publication` publish, digest and export them.
Most modules import torch; import them by path.
"""
