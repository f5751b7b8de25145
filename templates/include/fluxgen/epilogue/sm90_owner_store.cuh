// A TMA store whose descriptor is chosen on the device: one of those in the kernel's parameters.
//
// CUTLASS's epilogue keeps one descriptor among its parameters, 64-byte aligned with much else. A copy
// of them all per owner made a kernel's parameters 14,336 bytes; now it is 4,096.
#ifndef FLUXGEN_EPILOGUE_SM90_OWNER_STORE_CUH_
#define FLUXGEN_EPILOGUE_SM90_OWNER_STORE_CUH_

#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cutlass/epilogue/collective/collective_epilogue.hpp"

namespace fluxgen {

// The operation: as cute::SM90_TMA_STORE, through the descriptor that its traits point to.
struct OwnerStore : cute::SM90_TMA_STORE {};

// CUTLASS's epilogue with that operation in place of its own.
template <class Epilogue>
struct WithOwnerStore;

template <int kStagesC, int kStagesD, int kFragment, bool kReuse, bool kDelay, class CtaTile,
          class EpilogueTile, class ElementC, class StrideC, class ElementD, class StrideD,
          class Fusion, class LoadC, class LayoutC, class ReadC, class StoreD, class LayoutD,
          class WriteD, class AtomC, class Convert>
struct WithOwnerStore<cutlass::epilogue::collective::CollectiveEpilogue<
    cutlass::epilogue::Sm90TmaWarpSpecialized<kStagesC, kStagesD, kFragment, kReuse, kDelay>,
    CtaTile, EpilogueTile, ElementC, StrideC, ElementD, StrideD, Fusion, LoadC, LayoutC, ReadC,
    StoreD, LayoutD, WriteD, AtomC, Convert>> {
  static_assert(cute::is_same_v<StoreD, cute::SM90_TMA_STORE>, "expected tiles stored by TMA");
  using Type = cutlass::epilogue::collective::CollectiveEpilogue<
      cutlass::epilogue::Sm90TmaWarpSpecialized<kStagesC, kStagesD, kFragment, kReuse, kDelay>,
      CtaTile, EpilogueTile, ElementC, StrideC, ElementD, StrideD, Fusion, LoadC, LayoutC, ReadC,
      OwnerStore, LayoutD, WriteD, AtomC, Convert>;
};

}  // namespace fluxgen

namespace cute {

template <class NumBitsPerTMA, class AuxParams_>
struct Copy_Traits<fluxgen::OwnerStore, NumBitsPerTMA, AuxParams_>
    : Copy_Traits<SM90_TMA_STORE, NumBitsPerTMA, AuxParams_> {
  using Base = Copy_Traits<SM90_TMA_STORE, NumBitsPerTMA, AuxParams_>;

  TmaDescriptor const* owner = nullptr;  // in parameter, constant or global memory

  Copy_Traits() = default;
  CUTE_HOST_DEVICE Copy_Traits(TmaDescriptor const& descriptor, AuxParams_ const& aux)
      : Base{descriptor, aux} {}

  template <class TS, class SLayout, class TD, class DLayout>
  CUTE_HOST_DEVICE friend constexpr void copy_unpack(Copy_Traits const& traits,
                                                     Tensor<TS, SLayout> const& src,
                                                     Tensor<TD, DLayout>& dst) {
    static_assert(is_smem<TS>::value, "expected a source in shared memory");
    void const* const from = raw_pointer_cast(src.data());
    auto const to = dst.data().coord_;
    return detail::explode_tuple(detail::CallCOPY<SM90_TMA_STORE>{},
                                 make_tuple(static_cast<void const*>(traits.owner), from),
                                 seq<0, 1>{}, to, tuple_seq<decltype(to)>{});
  }
};

}  // namespace cute
#endif  // FLUXGEN_EPILOGUE_SM90_OWNER_STORE_CUH_
