"""Folders of the `adapters` library: an adapter, a fusion, or a whole setup, each with or without a head.

adapter_config.json          adapter.safetensors                 one adapter
adapter_fusion_config.json   model_adapter_fusion.safetensors    a fusion, whose members are on the host
head_config.json             model_head.safetensors              beside either, or alone: a head
adapter_setup.json           <adapter>/ …  <a,b>/                a setup: a folder for each adapter and fusion

options       their configs
layout        where they keep their modules, and the keys of their tensors
to_inlay      their options as our methods
to_adapters   our methods as their options
heads         their heads, both ways
setups        adapter_setup.json
read          a folder becomes an inlay
write         an inlay becomes a folder
"""
