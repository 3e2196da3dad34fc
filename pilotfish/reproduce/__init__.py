"""The paper's tables on models that run here: ``python -m pilotfish.reproduce``. Nothing else imports it.

The paper is Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023, arXiv
2211.17192).
"""
