"""Where fresh processes run."""

from recipes.fresh import ROOT as ROOT
