// Kernels of one dispatch level that are defined in other files than the table, which is in kernel_advance.cpp.
#pragma once

#include "continuous/kernels.hpp"

namespace egru::EGRU_LEVEL {

egru::continuous::Crossing continuous_find_crossing(const egru::continuous::Model& model, int unit, double a_u,
                                                    double a_z, double c, double span,
                                                    egru::continuous::Scratch* scratch);
// The kernels of linear units.
egru::continuous::Crossing continuous_find_linear_crossing(const egru::continuous::Model& model, int unit, double a_u,
                                                           double a_z, double c, double span);
void continuous_advance_linear(const egru::continuous::Model& model, const egru::continuous::State& state,
                               const egru::continuous::Touch& touch);
egru::continuous::ReceiverSums continuous_pull_back_linear(const egru::continuous::Model& model,
                                                           egru::continuous::Adjoint* adjoint,
                                                           const egru::continuous::TouchAdjoint& touch);
egru::continuous::ReceiverSums continuous_pull_back(const egru::continuous::Model& model,
                                                    egru::continuous::Adjoint* adjoint,
                                                    const egru::continuous::TouchAdjoint& touch,
                                                    egru::continuous::Scratch* scratch);

}  // namespace egru::EGRU_LEVEL
