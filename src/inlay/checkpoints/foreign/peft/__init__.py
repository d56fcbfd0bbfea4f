"""Folders of `peft`: LoRA, with or without a head and trained biases; prompts, prefixes and IA3.

adapter_config.json         peft_type LORA, r, lora_alpha, target_modules, patterns …
adapter_model.safetensors   base_model.model.<module>.lora_A.weight (r, D_in), .lora_B.weight (D_out, r)
                            base_model.model.<module>.base_layer.bias, or <module>.bias where there is no LoRA
                            base_model.model.<head module>.<parameter>        of modules_to_save

options                adapter_config.json
targets                which modules its names and patterns mean
keys                   which key of the file is which tensor of ours
lora_pair              the two matrices that a module has there
heads                  the head, of which peft saves copies of the host's modules
prompts_prefixes_ia3   these three, both ways
read                   a folder becomes an inlay
write                  an inlay becomes a folder
"""
