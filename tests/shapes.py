"""How shapes in signatures are checked: beartype, with ints welcome where floats are asked for."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
