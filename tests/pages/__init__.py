"""The pages of docs: their code runs, and what they list is what there is."""
