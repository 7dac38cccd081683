"""Training in transformers and TRL with `flash_attention`: one call registers it, and models name it "trunkattn".

from trunkattn.integrations.transformers import register

register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="trunkattn")
model(input_ids, position_ids=position_ids, tree=tree)
"""

from trunkattn.integrations.transformers.attention import attend
from trunkattn.integrations.transformers.masks import NAME, mask
from trunkattn.integrations.transformers.registration import register
from trunkattn.integrations.transformers.trl import replace_tree_attention

__all__ = ["NAME", "attend", "mask", "register", "replace_tree_attention"]
