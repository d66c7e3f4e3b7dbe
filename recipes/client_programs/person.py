"""A class that clients ask for; its values are short, so that a small model comes to the end of it."""

from pydantic import BaseModel, Field


class Person(BaseModel):
    """Note a person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)
