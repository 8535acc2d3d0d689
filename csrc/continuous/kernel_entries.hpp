// The kernels of one level, which touch.cpp gathers into its table.
#pragma once

#include "continuous/kernels.hpp"

namespace egru::EGRU_LEVEL {

egru::continuous::Crossing continuous_crossing(const egru::continuous::Model& model, int unit, double a_u, double a_z,
                                               double c, double span);
egru::continuous::Sums continuous_pull(const egru::continuous::Model& model, egru::continuous::Adjoint* adjoint,
                                       const egru::continuous::Pull& pull, egru::continuous::Scratch* scratch);

}  // namespace egru::EGRU_LEVEL
