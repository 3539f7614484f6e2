"""Counter-based random numbers: each is a function of (seed, step, draw, position in the global tensor) and of nothing else (contract C5).

bits       the source: 32 random bits for an element
draws      distributions made of it, one for each random op
keys       seeds, streams and the mixing of both
rewrite    a captured step whose random ops have become draws
"""
