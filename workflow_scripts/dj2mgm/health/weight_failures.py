"""Failures of weights that training or saving damaged."""

from dj2mgm.health.failure_signature import Signature, make_fixed_explanation

WEIGHT_SIGNATURES = (
    Signature(
        "LoRA weights are empty",
        r"size mismatch for (?P<tensor>\S*lora_\S+): copying a param with shape torch\.Size\(\[0\]\) from checkpoint"
        r"|BrokenWeightsError: (?:tensor (?P<broken>\S*lora_\S+) has shape \(0,\)|every lora_B matrix is zero)",
        make_fixed_explanation(
            "LoRA weights {tensor}{broken} were saved empty or untrained. Under ZeRO-3 a process holds only its part "
            "of each weight, and saving without gathering the parts writes nothing",
            "do not use this adapter. This workflow gathers and checks weights before a checkpoint counts; delete the "
            "stage's `checkpoints` folder and run it again. An adapter from elsewhere must be saved again with "
            "gathered weights (`stage3_gather_16bit_weights_on_model_save: true`)",
        ),
    ),
    Signature(
        "The loss is not a number",
        r"\bloss'?:? ?'?(?P<value>nan|inf)\b|BrokenWeightsError: tensor \S+ holds values that are not finite"
        r"|\btraining diverged by step \d+: |Current loss scale already at minimum - cannot decrease scale anymore",
        make_fixed_explanation(
            "training diverged; the loss or the weights became infinite or not a number",
            "lower learning_rate (to a third), keep max_grad_norm at 1.0, use precision: bf16 (never fp16), and "
            "inspect the rows of the step before. Delete the stage's `checkpoints` folder if the damage is older than "
            "the last checkpoint",
        ),
        symptom=True,
    ),
)
