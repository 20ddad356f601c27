"""Text to ids and back: tokenizers of Hugging Face directories and GGUF files, streams, chat templates.

tokenizer = load_tokenizer(Path("model.gguf"))
ids = tokenizer.encode("Hello")
detokenizer = tokenizer.stream(prompt_ids=ids)
text = "".join(detokenizer.push(i) for i in output_ids) + detokenizer.flush()
"""

from ksana.tokenizers.detokenizer import Detokenizer
from ksana.tokenizers.load import load_tokenizer
from ksana.tokenizers.stop_matcher import StopMatcher
from ksana.tokenizers.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer", "load_tokenizer"]
